"""A model spread over several devices: their measurement, placement, deployment, and the pipeline of stages."""
