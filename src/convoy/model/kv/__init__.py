"""Block tables and pools of a stage, and the description of a batch over them."""
