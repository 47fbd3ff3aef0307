"""The demo: four processes, one index, a crash and a pause.

``python -m tako_sync.demo [FOLDER]`` builds a full-text index of a folder under one lease, lets
things go wrong, and computes a verdict from what the processes reported.
"""
