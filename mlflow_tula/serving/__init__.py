"""The recommender as a registered model, and as pages and an endpoint of an MLflow server."""
