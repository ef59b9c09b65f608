"""Packaging: distribution ``gradfuse``, import package ``inductor_ext``.

The top-level ``templates/`` directory ships as the package ``inductor_ext.templates``, so that a wheel holds the Jinja
sources and nothing named ``templates`` lands in site-packages' top level.
"""

from setuptools import setup

setup(
    packages=[
        "inductor_ext",
        "inductor_ext.analysis",
        "inductor_ext.rewrites",
        "inductor_ext.lowerings",
        "inductor_ext.templates",
    ],
    py_modules=["gradfuse"],
    package_dir={"inductor_ext.templates": "templates"},
    package_data={"inductor_ext.templates": ["*.jinja"]},
    entry_points={
        "torch_dynamo_backends": ["gradfuse = inductor_ext.backend:gradfuse"],
        "console_scripts": ["gradfuse = inductor_ext.cli:main"],
    },
)
