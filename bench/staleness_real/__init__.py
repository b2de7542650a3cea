"""Learning at a forced lag in the real system: learner, hub and actors as `streamrl launch` starts them."""
