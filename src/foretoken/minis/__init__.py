"""Small models we train ourselves, their data, recipes, shipped weights and widened forms."""

from __future__ import annotations

from foretoken.shipped import NAMES as NAMES
from foretoken.shipped import path as path
