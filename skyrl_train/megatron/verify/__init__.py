"""Comparison of models and parallel layouts with Hugging Face. Read `layout_check`, `outcome`, then `model_check`."""
