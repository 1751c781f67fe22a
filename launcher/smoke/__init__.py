"""``./start.sh smoke``: tries a running server against the shape of DeepSeek's own API."""
