"""Tests of the library; what several of them use is imported by its full name, ``tests.tiny``."""
