"""Evaluation of models on benchmarks, from sampling and scoring responses to statistics and a report.

Modules import only modules of earlier layers. The layers are (``store``, ``benchmarks``, ``targets``, ``results``),
(``tasks``, ``statistics``), (``generation``, ``scoring``, ``report``), ``reranking`` and ``evaluate``.
"""
