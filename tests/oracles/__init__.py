"""The algorithms against implementations by other people: `make oracles` installs those and runs this folder.

Every oracle is a fixture of `conftest`. Where a package is not installed its tests are skipped; `make oracles` names
the packages of each environment, and there a missing one is an error.
"""
