"""Several runs as one: a grid or a search over settings, a few at once on this machine: `streamrl launch -m`."""
