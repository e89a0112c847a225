"""The paper's analysis of exploration and exploitation in tokens and hidden states.

Import order within the package: metrics <- sheets <- figures; correlations <- early; publish; analyse imports all of
them.
"""
