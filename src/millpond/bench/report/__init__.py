"""A run's report as one HTML file: sentences, plots, tables, and how to run it again."""

from millpond.bench.report.page import report_html

__all__ = ["report_html"]
