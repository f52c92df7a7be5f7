"""Thin command lines, run as ``python -m tools.NAME``. They may import anything; nothing imports them."""
