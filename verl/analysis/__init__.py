"""The paper's analysis of exploration and exploitation in tokens and hidden states.

Each module imports only modules before it in this order: metrics, sheets, correlations, early, drawing, figures,
publish, measure, analyse.
"""
