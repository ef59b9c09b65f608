"""Pure functions over FX graphs: what does a gradient consist of, what does an index depend on?"""
