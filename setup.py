"""The list of packages: what is found in tierkv/, and the two folders that are installed inside it."""

from setuptools import find_packages, setup

setup(packages=sorted({*find_packages(include=["tierkv", "tierkv.*"]), "tierkv.tiers", "tierkv.policies"}))
