"""Watchers: small processes that outlive the launcher and report."""
