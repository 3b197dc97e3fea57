"""Models from the hub: listed, downloaded, resumed."""
