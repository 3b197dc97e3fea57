"""Device discovery: mDNS, interfaces, probes."""
