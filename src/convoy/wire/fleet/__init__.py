"""Messages between providers, coordinators and proxies, certificates and sealed records."""
