"""The library's entry points for scripts and notebooks: train a run, go on with one, read one."""
