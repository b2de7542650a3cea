"""A reward model in a process of its own, asked over HTTP: `streamrl reward-model DIR`."""
