"""TPM 2.0 structures, credentials and endorsement certificates, parsed strictly."""
