"""One module per predicted quantity; formulas.py holds each equation once, numpy only."""
