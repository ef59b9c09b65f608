"""Packaging: distribution ``gradfuse``, import package ``inductor_ext``.

The top-level ``templates/`` directory ships as the package ``inductor_ext.templates``, so that a wheel holds the Jinja
sources and nothing named ``templates`` lands in site-packages' top level.
"""

from pathlib import Path

from setuptools import setup

setup(
    name="gradfuse",
    version="0.1.0",
    description="A torch.compile backend that makes the backward pass of modern models correct, fast and reproducible",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.16",
        "triton; sys_platform == 'linux'",
        "sympy",
        "numpy",
        "tabulate>=0.9",
        "tqdm",
    ],
    extras_require={
        # NumPy 2.4 no longer turns one-element arrays into scalars, which Triton 3.6's interpreter relies on.
        "test": ["pytest", "expecttest", "pytest-xdist", "hypothesis", "ruff", "numpy<2.4"],
        "bench": ["matplotlib"],
    },
    packages=[
        "inductor_ext",
        "inductor_ext.attention",
        "inductor_ext.casts",
        "inductor_ext.core",
        "inductor_ext.demo",
        "inductor_ext.gathers",
        "inductor_ext.mlstm",
        "inductor_ext.scan",
        "inductor_ext.templates",
    ],
    py_modules=["gradfuse"],
    package_dir={"inductor_ext.templates": "templates"},
    package_data={"inductor_ext": ["py.typed"], "inductor_ext.templates": ["*/*.jinja"]},
    entry_points={
        "torch_dynamo_backends": ["gradfuse = inductor_ext.backend:gradfuse"],
        "console_scripts": ["gradfuse = inductor_ext.cli:main"],
    },
)
