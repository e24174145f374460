"""Pure functions from trace to picture, table or message; they escape what a model wrote."""
