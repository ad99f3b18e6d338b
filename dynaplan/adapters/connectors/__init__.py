"""How the planner's decisions reach whoever starts and stops workers."""
