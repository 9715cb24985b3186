"""Tests of Raysume."""
