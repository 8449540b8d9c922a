"""What is measured, against which peers, with one command each.

No program imports it; results are files in `results`.
"""
