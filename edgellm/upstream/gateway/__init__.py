"""A gateway: stock servers answer the sessions of devices."""
