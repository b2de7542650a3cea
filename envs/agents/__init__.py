"""Agents: programs that bring their own loop, and call the model over HTTP."""
