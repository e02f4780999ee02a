"""Decisions on request: the recommender as a served model, and pages in `mlflow server`.

    questions.py            one request in, checked; the answer as one row
    catalogue.py            champions and their files, cached, a new champion within seconds
    champions.py            what the registry says of champions, and what lies in their files
    foreseen.py             what other models of a hardware say of a workload new to it
    recommender.py          questions -> decisions; what the model and the pages ask
    faults.py               our errors as MLflow's and as HTTP statuses, one sentence each
    recommender_model.py    the registered model `tula.recommender` ("models from code")
    recommender_files.py    registers it
    curves.py               what a page draws: curve, band, measured points, limit, Pareto front
    pages.py app.py         `mlflow server --app-name tula`

Nothing of a request is imported, executed or used as a path.
"""
