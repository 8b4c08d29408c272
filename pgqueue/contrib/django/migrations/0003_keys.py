from pgqueue.contrib.django.revisions import migration

Migration = migration(__name__)
