"""Records from data files: readers, the shapes that records come in, splits and mixtures."""
