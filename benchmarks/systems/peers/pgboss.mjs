// Calls of pg-boss for a consumer: one JSON document a line comes in, one goes out. Ends when its input does.
import { createInterface } from 'node:readline'

const [home, connectionString, install] = process.argv.slice(2)
const { PgBoss } = await import(`${home}/node_modules/pg-boss/dist/index.js`)
const queue = 'bench'
const boss = new PgBoss({ connectionString, max: 1, supervise: false, schedule: false, migrate: install === 'install' })
boss.on('error', error => console.error(error))
await boss.start()
if (install === 'install') await boss.createQueue(queue)

const calls = {
  insert: async rows => { await boss.insert(queue, rows) },
  fetch: async options => (await boss.fetch(queue, options)).map(({ id, data }) => ({ id, data })),
  complete: async ids => (await boss.complete(queue, ids)).affected,
  backlog: async () =>
    Number((await boss.getDb().executeSql("SELECT count(*) FROM pgboss.job WHERE state < 'completed'")).rows[0].count),
}
for await (const line of createInterface({ input: process.stdin })) {
  const [call, argument] = JSON.parse(line)
  try {
    process.stdout.write(JSON.stringify({ result: (await calls[call](argument)) ?? null }) + '\n')
  } catch (error) {
    process.stdout.write(JSON.stringify({ error: String(error) }) + '\n')
  }
}
await boss.stop({ graceful: false })
