"""Puts configs/ and examples/ into the wheel, where `jaxrl` finds them; see pyproject.toml."""

from setuptools import find_packages, setup

BUNDLED = {f"jaxrl.bundled.{folder}": folder for folder in ("configs", "examples")}

setup(
    packages=[*find_packages(include=["jaxrl*"]), *BUNDLED],
    package_dir=BUNDLED,
    package_data={
        "jaxrl.bundled.configs": ["models/*/*.json"],
        "jaxrl.extras.view": ["page.html", "page.css", "page.js"],
    },
)
