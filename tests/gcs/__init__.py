"""Servers that speak the JSON API of Google Cloud Storage, for the tests of what talks to it.

``gcs.server`` is our own, strict and able to fail in every way; ``gcs.independent`` starts one
written by others. Everything here needs the standard library only, the tests excepted.
"""
