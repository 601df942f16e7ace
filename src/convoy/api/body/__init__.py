"""Read a request's body within its limits of bytes, time and shape, and refuse fields that are not served."""
