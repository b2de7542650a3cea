"""Policy losses per token: `weighted` (detached weight times log pi) and `clipped` (bounded ratio)."""
