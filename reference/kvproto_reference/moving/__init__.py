"""Engines that are prefill and decode by turns, and move pages, requests and roles between each other."""
