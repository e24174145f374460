"""The teaching app: shows runs of the core, and never touches a tensor."""
