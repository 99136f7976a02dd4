"""Device memory of a rank: offloading, reloading and saving its weights and optimizer state. Read `memory`, then
`storages` and `state`.
"""
