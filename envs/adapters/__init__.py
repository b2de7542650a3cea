"""Environments and rewards written for other projects, played unchanged: one module for each interface."""
