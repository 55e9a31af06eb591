"""Tests; a package, so that ranks can import what they are sent."""
