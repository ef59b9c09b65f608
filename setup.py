"""Packaging: distribution ``gradfuse``, import package ``inductor_ext``. The metadata is in pyproject.toml.

Setuptools cannot find packages automatically and map a directory to a package in pyproject.toml at once, so both are here:
every package below ``inductor_ext`` is found, and the top-level directory ``templates/`` ships as the package
``inductor_ext.templates``. So a wheel holds the Jinja sources, and nothing named ``templates`` lands in site-packages.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["inductor_ext", "inductor_ext.*"]), "inductor_ext.templates"],
    package_dir={"inductor_ext.templates": "templates"},
    py_modules=["gradfuse"],
)
