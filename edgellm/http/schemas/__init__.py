"""Requests, responses and errors of the HTTP API."""
