"""Code written for skyrl_train 0.4: its names, signatures and shapes over the three seams of this project.

`modules.py` lists the modules of 0.4 and where their names are here, `finder.py` makes them importable. Nothing else in
the package knows this folder. Read `settings` and `experiment` (an entry of 0.4), `losses` and `estimators` (padded
tensors), then `generators/` and `trainer`.
"""
