"""Models from the hub: listed, downloaded, resumed; and from Python packages."""
