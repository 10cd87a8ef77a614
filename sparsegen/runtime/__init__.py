"""Artifact → callable."""
