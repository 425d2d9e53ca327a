"""The report of an optimize run: one self-contained HTML file that opens offline."""

from __future__ import annotations

from wavecrest.report.page import render, write
from wavecrest.report.words import Headline, first_line, headline

__all__ = ["Headline", "first_line", "headline", "render", "write"]
