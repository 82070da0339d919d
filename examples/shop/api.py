"""The shop's API, in FastAPI with an AsyncSession: it takes documents too, and says how far they are.

uvicorn examples.shop.api:app --port 8000
"""

from typing import Annotated

from fastapi import Body, Depends, FastAPI, HTTPException, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import exc, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import fairqueue as fq
from fairqueue.fastapi import session_dependency
from fairqueue.status import Status, status

from .models import Document, WordCount, database_url

app = FastAPI(title="The shop")
engine = create_async_engine(database_url(), pool_pre_ping=True)
Db = Annotated[AsyncSession, Depends(session_dependency(engine))]


class Receipt(BaseModel):
    id: int
    title: str


@app.post("/{tenant}/documents", status_code=202)
async def upload(db: Db, tenant: str, text: Annotated[str, Body(embed=True)], name: str = "untitled") -> Receipt:
    """Store the document, and a message that its words are to be counted: both are committed, or neither."""
    document = Document(tenant=tenant, name=name, text=text)
    db.add(document)
    await db.flush()  # gives it its id
    fq.enqueue(db, tenant, {"document": document.id})

    # Whatever goes wrong from here to the commit takes both with it.
    receipt = Receipt(id=document.id, title=text.splitlines()[0])  # a bug: fails for an empty text, with a 500
    if "virus" in text:
        raise HTTPException(422, "this document is refused")

    await db.commit()
    return receipt


@app.get("/{tenant}/documents/{document_id}")
async def show(db: Db, tenant: str, document_id: Annotated[int, Path(ge=1, lt=2**31)]) -> dict[str, int | str | None]:
    """How far a document is: `words` is null until they are counted."""
    document = await db.get(Document, document_id)
    if document is None or document.tenant != tenant:
        raise HTTPException(404, f"{tenant} has no document {document_id}")
    words = await db.scalar(select(WordCount.words).where(WordCount.document_id == document_id))
    return {"id": document_id, "name": document.name, "words": words}


@app.get("/status")
async def look(db: Db) -> Status:
    """What stands in the queue: in all, and of the twenty tenants with the most."""
    return await status(db, limit=20)


@app.exception_handler(fq.InvalidValue)
async def refused(request: Request, error: Exception) -> JSONResponse:
    """A tenant with a name that no channel has. Nothing was stored."""
    return JSONResponse({"error": str(error)}, 422)


@app.exception_handler(exc.OperationalError)
@app.exception_handler(exc.TimeoutError)  # all connections of the pool are in use
async def database_is_away(request: Request, error: Exception) -> JSONResponse:
    """Nothing was stored; or, if it was the commit that was cut off, perhaps everything was: nobody can know."""
    text = "the database is away, or busy: look whether your document is there, or send it again"
    return JSONResponse({"error": text}, 503)
