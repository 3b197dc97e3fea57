"""Which devices there are: mDNS, interfaces, probes."""
