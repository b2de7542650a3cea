"""The release of streamrl: what `streamrl --version` prints and every actor reports to its hub."""

__version__ = "0.1.0"
