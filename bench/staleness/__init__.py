"""Does learning survive stale data? Training with a lag that is forced exactly, for every way of correcting it."""
